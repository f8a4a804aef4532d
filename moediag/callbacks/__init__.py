"""Laws in other libraries' training loops, and where their findings go.

``trainer_callback.TrainerLaws`` is for transformers, ``lightning_callback.LightningLaws`` for
Lightning; ``sinks`` writes findings and tokens per expert to JSONL, TensorBoard or W&B.
"""

__all__ = ["job_laws", "lightning_callback", "sinks", "trainer_callback"]
