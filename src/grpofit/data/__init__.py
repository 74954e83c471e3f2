"""Tasks, prompts and rewards: everything between a data set and a number per completion."""
