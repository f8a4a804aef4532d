"""What is collected while ranks stand still: stacks, the state of the machine, dumps."""

__all__ = ["collect", "dumps", "machine", "token_counts"]
