"""Jobs of a SLURM cluster: scripts from a job file, what runs in each task, the decision to go on."""
