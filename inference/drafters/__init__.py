"""Drafters that need no training; the one that a head makes is in `headway.inference.drafter`."""
