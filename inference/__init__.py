"""The target, with or without a head: cache, tree, draft, verify, generate."""
