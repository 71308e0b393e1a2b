// What somebody does first with the npm package; .ci/release-check runs it where nothing else is installed: ADDRESS of a registry.
import { connect, followEvents, Registry } from "@kvgrpc/client";

const { engines } = await new Registry(connect(process.argv[2])).listEngines({ timeoutMs: 10_000 });
if (engines.length !== 0 || typeof followEvents !== "function") process.exit(1);
process.exit(0); // without waiting for the connection to be idle
