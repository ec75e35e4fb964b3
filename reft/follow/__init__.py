"""Finds state of a script without the script's help, and includes it in every version
(:mod:`reft.engine.host_state`)."""

FOLLOWERS = {
    "flags": "reft.follow.flags:followers",
    "schedulers": "reft.follow.groups:followers",
}
