//! The other side: connects, negotiates, executes commands and waits for events. It blocks, for
//! programs that do one thing after the other.
