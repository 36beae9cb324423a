"""Text, drawings and tables for people, used by the other packages."""
