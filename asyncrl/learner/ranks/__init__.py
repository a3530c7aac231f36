"""The ranks of one learner or pool: where they meet, their process group, and machines that watch each other."""
