"""Prompts, dialogs, shards: what a head is trained on."""
