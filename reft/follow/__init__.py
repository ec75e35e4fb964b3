"""What a script holds and reft can find by itself: followed without a line
(:mod:`reft.engine.host_state`)."""

FOLLOWERS = {
    "flags": "reft.follow.flags:followers",
    "gradients": "reft.follow.gradients:followers",
    "schedulers": "reft.follow.groups:followers",
}
