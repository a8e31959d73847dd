"""What a head is: one family, one file; loss and step side by side."""
