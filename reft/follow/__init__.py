"""State of a script that reft finds by itself and includes in every version
(:mod:`reft.engine.host_state`)."""

FOLLOWERS = {
    "flags": "reft.follow.flags:followers",
    "schedulers": "reft.follow.groups:followers",
}
