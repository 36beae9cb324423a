"""Text, drawings and tables for people: what every room shows itself with."""
