"""Pretraining of a Llama-2: pipeline, data and tensor parallel. ``pretrain.py`` is the script."""

from pathlib import Path

PRETRAIN = str(Path(__file__).with_name("pretrain.py"))
