"""Human-readable text, drawings and tables, used by the other packages."""
