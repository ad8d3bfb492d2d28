"""Partita plans, runs and proves distributed training and serving of decoder language models."""

__version__ = "0.1.0"
