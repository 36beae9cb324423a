"""Scripts as FSDP1's tutorials write them: test_tutorials.py changes their import and no more."""
