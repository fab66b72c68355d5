"""A fleet: many hosts tune one list of problems into one PostgreSQL database. Each host runs the normal tuner.

`driver` runs where the command is typed: an engine (Ray or Slurm) starts one worker a host, and the driver deals the problems out
for each kind of hardware. `worker` runs on each host. It claims a problem from the `queue`, renews the claim while a separate
tuner process tunes it, and claims the next. Hosts and driver communicate only through the database.
"""
