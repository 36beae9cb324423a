"""Tools that monitor a run: loggers, profiles, audits, the flight recorder and the stabilizer."""
