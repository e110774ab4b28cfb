//! The infra container's program: holds a pod's namespaces, reaps orphans as process 1, ends on SIGTERM or SIGINT.
//!
//! No libc, no std, no start files: raw system calls only, so that it is built by plain `rustc` for the host's
//! architecture and fits in a few kilobytes. `windlass-net`'s build script compiles and embeds it.
//!
//! Invariants: never allocates, never polls, takes no argument, opens nothing.

#![no_std]
#![no_main]

use core::arch::{asm, global_asm};

#[cfg(target_arch = "x86_64")]
mod arch {
    pub const RT_SIGPROCMASK: usize = 14;
    pub const WAIT4: usize = 61;
    pub const RT_SIGTIMEDWAIT: usize = 128;
    pub const EXIT_GROUP: usize = 231;
}
#[cfg(target_arch = "aarch64")]
mod arch {
    pub const RT_SIGPROCMASK: usize = 135;
    pub const WAIT4: usize = 260;
    pub const RT_SIGTIMEDWAIT: usize = 137;
    pub const EXIT_GROUP: usize = 94;
}

#[cfg(target_arch = "x86_64")]
global_asm!(".globl _start", "_start:", "xor ebp, ebp", "and rsp, -16", "call {main}", "ud2", main = sym main);
#[cfg(target_arch = "aarch64")]
global_asm!(".globl _start", "_start:", "mov x29, #0", "bl {main}", "brk #1", main = sym main);

/// A system call of up to four arguments.
///
/// # Safety
/// Pointers among the arguments must be valid for what the call does with them.
#[cfg(target_arch = "x86_64")]
unsafe fn syscall(number: usize, a: usize, b: usize, c: usize, d: usize) -> isize {
    let result: isize;
    // SAFETY: the kernel's calling convention; it clobbers rcx and r11 and nothing else.
    unsafe {
        asm!("syscall", inlateout("rax") number as isize => result, in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d,
             lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    result
}

/// A system call of up to four arguments.
///
/// # Safety
/// Pointers among the arguments must be valid for what the call does with them.
#[cfg(target_arch = "aarch64")]
unsafe fn syscall(number: usize, a: usize, b: usize, c: usize, d: usize) -> isize {
    let result: isize;
    // SAFETY: the kernel's calling convention.
    unsafe {
        asm!("svc #0", in("x8") number, inlateout("x0") a as isize => result, in("x1") b, in("x2") c, in("x3") d,
             options(nostack));
    }
    result
}

const SIG_BLOCK: usize = 0;
const SIGINT: usize = 2;
const SIGTERM: usize = 15;
const SIGCHLD: usize = 17;
const WNOHANG: usize = 1;
const ANY_CHILD: usize = usize::MAX;
/// The kernel's `sigset_t`, in bytes.
const SIGSET_SIZE: usize = 8;

extern "C" fn main() -> ! {
    let set: u64 = 1 << (SIGINT - 1) | 1 << (SIGTERM - 1) | 1 << (SIGCHLD - 1);
    let set_at = &raw const set as usize;
    // Blocked signals are queued even for process 1, which otherwise never gets one whose action is the default.
    // SAFETY: `set` lives until the end of the program.
    unsafe { syscall(arch::RT_SIGPROCMASK, SIG_BLOCK, set_at, 0, SIGSET_SIZE) };
    loop {
        // SAFETY: as above; no siginfo and no timeout are asked for.
        let signal = unsafe { syscall(arch::RT_SIGTIMEDWAIT, set_at, 0, 0, SIGSET_SIZE) };
        match usize::try_from(signal) {
            Ok(SIGINT | SIGTERM) => exit(0),
            // One SIGCHLD may stand for many children.
            // SAFETY: no pointers.
            Ok(SIGCHLD) => while unsafe { syscall(arch::WAIT4, ANY_CHILD, 0, WNOHANG, 0) } > 0 {},
            _ => {}
        }
    }
}

fn exit(code: usize) -> ! {
    loop {
        // SAFETY: no pointers; does not return.
        unsafe { syscall(arch::EXIT_GROUP, code, 0, 0, 0) };
    }
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    exit(101)
}
