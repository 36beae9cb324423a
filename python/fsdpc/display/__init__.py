"""Text, drawings and tables for people, used by every other package."""
