"""fsdpc in the trainers of others, with the real packages."""
