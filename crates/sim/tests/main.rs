//! The simulator's tests, as one program: each program compiles the engine's futures again.

mod budget;
mod coverage;
mod disk;
mod faults;
mod smoke;
