"""What other engines read: one module per layout, its writer and its reader; and, apart from both, how an engine reads it."""
