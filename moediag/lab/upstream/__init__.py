"""What an upstream bug report needs: a description of the environment and a draft of the issue."""

__all__ = ["draft", "draft_evidence", "export", "stack_information"]
