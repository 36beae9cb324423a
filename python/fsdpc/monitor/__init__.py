"""What watches a run: loggers, profiles, audits, the flight recorder, the stabilizer."""
