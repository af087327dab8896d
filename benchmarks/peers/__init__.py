"""One small file per peer: document D's job, written as that peer's own documentation would write it."""
