//! Compiles the contract for server reflection.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() -> Result<(), Box<dyn Error>> {
    let protos = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../protos");
    println!("cargo:rerun-if-changed={}", protos.display());
    let files = ["kvgrpc/v1/index_service.proto", "kvgrpc/v1/server_service.proto"].map(|name| protos.join(name));
    let mut compiler = protox::Compiler::new([&protos])?;
    compiler.include_imports(true).include_source_info(false).open_files(files)?;
    let out: PathBuf = env::var("OUT_DIR")?.into();
    fs::write(out.join("contract.binpb"), compiler.encode_file_descriptor_set())?;
    Ok(())
}
