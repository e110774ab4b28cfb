//! Compiles the pause program with plain `rustc` and leaves it in `OUT_DIR` for `pause.rs` to embed.

use std::path::PathBuf;
use std::process::Command;

fn main() {
    let source = PathBuf::from(var("CARGO_MANIFEST_DIR")).join("../pause/main.rs");
    println!("cargo::rerun-if-changed={}", source.display());
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=RUSTC_LINKER");
    let output = PathBuf::from(var("OUT_DIR")).join("pause");
    let mut command = Command::new(var("RUSTC"));
    command
        .args(["--edition", "2024", "--crate-name", "pause", "--crate-type", "bin"])
        .args(["-C", "panic=abort", "-C", "opt-level=s", "-C", "strip=symbols", "-C", "relocation-model=static"])
        .args(["-C", "debuginfo=0", "-C", "codegen-units=1", "-C", "lto=true", "-C", "target-feature=+crt-static"])
        .args(["-nostartfiles", "-nostdlib", "-static", "-Wl,--build-id=none", "-Wl,-z,noseparate-code", "-Wl,-z,norelro"]
            .iter()
            .flat_map(|a| ["-C".to_owned(), format!("link-arg={a}")]))
        .args(["--target", &var("TARGET")])
        .arg("-o")
        .arg(&output)
        .arg(&source);
    if let Ok(linker) = std::env::var("RUSTC_LINKER") {
        command.arg("-C").arg(format!("linker={linker}"));
    }
    match command.status() {
        Ok(status) if status.success() => {}
        Ok(status) => fail(&format!("rustc ended with {status} on {}", source.display())),
        Err(error) => fail(&format!("rustc could not be started: {error}")),
    }
}

fn var(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| fail(&format!("{name} is not set; this is run by cargo")))
}

fn fail(message: &str) -> ! {
    eprintln!("the pause program was not built: {message}");
    std::process::exit(1)
}
