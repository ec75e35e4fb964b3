"""A Llama-2 pretraining job on DeepSpeed: pipeline, data and tensor parallel. ``python -m reft.pretrain``."""
