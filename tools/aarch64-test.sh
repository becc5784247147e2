#!/usr/bin/env bash
# Builds and tests for 64-bit Arm on an x86-64 Debian machine, without Arm hardware.
#
#   tools/aarch64-test.sh setup                                fetch the toolchain, then stop
#   tools/aarch64-test.sh test --release -p rill-kernels       cargo test for aarch64, run under QEMU
#   tools/aarch64-test.sh build --release --workspace          the same with cargo build
#
# NEON and dot-product instructions really execute, so answers can be trusted; speeds cannot.
#
# The compiler is Debian's own, because Debian ships the standard library of both architectures at
# one version. It is unpacked below ~/.cache/rill-aarch64 rather than installed: the machine's own
# Rust stays as it is. The linker and QEMU are ordinary packages.
set -euo pipefail

usage="usage: tools/aarch64-test.sh setup | test|build|run [cargo arguments]"
command=${1:?$usage}
shift

target=aarch64-unknown-linux-gnu
home=$HOME/.cache/rill-aarch64
sysroot=$home/root/usr

fail() {
  echo "aarch64-test: $*" >&2
  exit 1
}

as_root() {
  if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi
}

# First package whose name matches the pattern among the dependencies of a package.
dependency() {
  apt-cache depends "$1" | grep -o -m 1 "$2" || fail "$1 has no dependency like $2: look at 'apt-cache policy $1'"
}

set_up() {
  [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] && [ -n "$(command -v apt-get)" ] ||
    fail "needs an x86-64 Debian; elsewhere use 'cargo test' on an Arm machine"
  as_root dpkg --add-architecture arm64
  as_root apt-get update -qq
  as_root apt-get install -y -qq qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross

  local std llvm unpacked=$home/root.partial
  std=$(dependency libstd-rust-web-dev 'libstd-rust-web-[0-9][0-9.]*')
  # The compiler links LLVM dynamically, so that one library has to be installed for this machine.
  llvm=$(apt-cache depends "$std" | grep -o -m 1 'libllvm[0-9][0-9]*' || true)
  [ -z "$llvm" ] || as_root apt-get install -y -qq "$llvm"

  rm -rf "$home/deb" "$unpacked"
  mkdir -p "$home/deb" "$unpacked"
  (cd "$home/deb" && apt-get download -qq rustc-web "$std" "$std:arm64" \
    libstd-rust-web-dev:amd64 libstd-rust-web-dev:arm64)
  for package in "$home"/deb/*.deb; do dpkg -x "$package" "$unpacked"; done
  # Renamed last: an interrupted set-up leaves no `root` behind and starts over.
  mv "$unpacked" "$home/root"
  rm -rf "$home/deb"
}

[ -d "$home/root" ] || set_up

export LD_LIBRARY_PATH=$sysroot/lib/x86_64-linux-gnu
export RUSTC=$sysroot/bin/rustc RUSTDOC=$sysroot/bin/rustdoc
export RUSTFLAGS="--sysroot $sysroot" RUSTDOCFLAGS="--sysroot $sysroot"
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target/aarch64}
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu"

case $command in
setup) "$RUSTC" --version ;;
test | build | run) exec cargo "$command" --target "$target" "$@" ;;
*) fail "$usage" ;;
esac
