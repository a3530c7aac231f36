"""A run as a job of Slurm: the script that is submitted, and the launcher that runs inside of it."""
