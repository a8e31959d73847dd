"""What every family shares: the protocol, blocks, losses, draft vocabulary, checkpoint."""
