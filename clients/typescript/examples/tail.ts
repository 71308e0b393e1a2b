/** Prints what a rank publishes, one JSON line a batch: `node dist/examples/tail.js HOST:PORT [how many batches]`. */
import { clientOf, connect, EventService, watchEvents } from "../src/index.js";

const [address, howMany] = process.argv.slice(2);
if (address === undefined) {
  console.error("usage: node dist/examples/tail.js HOST:PORT [how many batches]");
  process.exit(2);
}
let left = howMany === undefined ? Infinity : Number(howMany);
for await (const item of watchEvents(clientOf(EventService, connect(address)))) {
  if (item.kind === "batch" || item.kind === "begin") {
    console.log(JSON.stringify(item, (_, value: unknown) => (typeof value === "bigint" ? value.toString() : value)));
  }
  if (item.kind === "failed") {
    console.error(item.failure.reasonName, item.failure.message);
  }
  if (item.kind === "batch" && --left === 0) {
    break;
  }
}
