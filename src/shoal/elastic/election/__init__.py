"""Who is the center: one protocol, and three ways to hold an election (files on one machine, a majority of voters, etcd)."""
