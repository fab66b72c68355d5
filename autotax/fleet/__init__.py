"""A fleet: many hosts tune one list of problems, each with today's tuner, into one PostgreSQL database.

`driver` runs where the command is typed: an engine (Ray or Slurm) starts one worker a host, and the driver deals the problems out
for each kind of hardware. `worker` runs on each host: it claims a problem at the `queue`, renews the claim while its `bench`, a
process of its own, tunes it, and claims the next. All that hosts and driver tell each other goes through the database.
"""
