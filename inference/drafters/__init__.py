"""What proposes trees: a head, and what needs no training."""
