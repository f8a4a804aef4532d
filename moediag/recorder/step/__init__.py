"""What the instruments that measure a training step have in common."""

__all__ = ["checkpoint_files", "hooks", "instrument", "numbers", "pieces", "tensor_error"]
