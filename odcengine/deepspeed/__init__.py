"""A stock DeepSpeed ZeRO-3 engine with on-demand communication; see ``docs/deepspeed.md``."""
