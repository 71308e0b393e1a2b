//! Writes the generated code of the crate: `cargo run -p kvgrpc-codegen -- PROTOS OUT`.

use std::{env, error::Error, fs, path::PathBuf};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = env::args().skip(1).map(PathBuf::from);
    let protos = arguments.next().ok_or("the folder of the protos is missing")?;
    let out = arguments.next().ok_or("the folder to write to is missing")?;
    let mut files: Vec<PathBuf> = fs::read_dir(protos.join("kvgrpc/v1"))?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<Result<_, _>>()?;
    files.retain(|path| path.extension().is_some_and(|extension| extension == "proto"));
    files.sort();
    let descriptors = protox::compile(files, [&protos])?;
    fs::create_dir_all(&out)?;
    tonic_prost_build::configure()
        .server_mod_attribute(".", "#[cfg(feature = \"server\")]")
        // By hand: src/hashes.rs.
        .extern_path(".kvgrpc.v1.BlockHashes", "crate::pb::BlockHashes")
        .out_dir(&out)
        .compile_fds(descriptors)?;
    Ok(())
}
