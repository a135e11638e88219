"""The center of a job: membership, admission, the vote on checkpoints, and candidates for it."""
