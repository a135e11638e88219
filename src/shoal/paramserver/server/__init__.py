"""The server side: shards, their replicas, replication and the log follower."""
