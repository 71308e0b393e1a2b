/** Bearer tokens: made for each call and target from a secret that is never sent. docs/tokens.md has the rule. */
import { createHmac } from "node:crypto";
import { isIPv4, isIPv6 } from "node:net";

const VERSION = "kvgrpc1";
const KEY_ID_DIGITS = 16;
/** Who gets a token can try secrets against it. */
export const SHORTEST_SECRET = 16;

/** The header for calls to `target`, as `targetOf` spells it, at that second since 1970. */
export function authorization(secret: string, target: string, second: number): string {
  const keyId = mac(secret, `${VERSION} key id`).toString("hex").slice(0, KEY_ID_DIGITS);
  const signed = [VERSION, keyId, second, Buffer.from(target).toString("base64url")].join(".");
  return `Bearer ${signed}.${mac(mac(secret, `${VERSION} audience ${target}`), signed).toString("base64url")}`;
}

/** What a token names that is sent to `address`: "host:port", "unix:/path" or "unix-abstract:name" in its one spelling. */
export function targetOf(address: string): string {
  if (address.startsWith("unix-abstract:")) return address;
  if (address.startsWith("unix:")) return `unix:${address.slice("unix:".length).replace(/^\/\//, "")}`;
  const found = /^(?:\[([^\]]+)\]|([^:[\]]+)):(\d{1,5})$/.exec(address);
  const port = Number(found?.[3]);
  if (found === null || port > 65_535) {
    throw new TypeError(`address ${JSON.stringify(address)}: "host:port", "unix:/path" or "unix-abstract:name" is needed`);
  }
  return `${hostOf(found[1] ?? found[2] ?? "")}:${port}`;
}

function hostOf(host: string): string {
  if (!isIPv6(host)) return isIPv4(host) ? host : host.toLowerCase().replace(/\.$/, "");
  const compressed = new URL(`http://[${host}]`).hostname;
  const mapped = /^\[::ffff:([0-9a-f]+):([0-9a-f]+)\]$/.exec(compressed);
  if (mapped === null) return compressed;
  const [high, low] = [parseInt(mapped[1] ?? "", 16), parseInt(mapped[2] ?? "", 16)];
  return [high >> 8, high & 255, low >> 8, low & 255].join(".");
}

function mac(key: string | Buffer, text: string): Buffer {
  return createHmac("sha256", key).update(text).digest();
}
