/** A connection to a kvgrpc server. */
import { createClient, type Client, type Interceptor, type Transport } from "@connectrpc/connect";
import type { DescService } from "@bufbuild/protobuf";
import { createGrpcTransport, Http2SessionManager } from "@connectrpc/connect-node";
import type { SecureClientSessionOptions } from "node:http2";
import { connect as openSocket } from "node:net";

import { Silence } from "./errors.js";
import { authorization, SHORTEST_SECRET, targetOf } from "./token.js";

/** As kvgrpc's own clients; servers send away who pings more often than each 10 s. */
const PING_INTERVAL_MS = 30_000;
const PING_TIMEOUT_MS = 10_000;

export interface ConnectOptions {
  /** What bearer tokens are made of, for servers that ask for one; it is never sent. Tokens go over TLS only. */
  secret?: string;
  /** Certificates and keys as node:tls takes them; `{}` trusts the system's authorities. Absent: plaintext. */
  tls?: SecureClientSessionOptions;
}

/**
 * `address`: "host:port" or "unix:/path". Throws TypeError for an address without a port, a secret that is too short, and for tokens that
 * would go in plaintext.
 */
export function connect(address: string, options: ConnectOptions = {}): Transport {
  const path = /^unix:(?:\/\/)?(\/.+)$/.exec(address)?.[1];
  if (path === undefined && !/^(\[[^\]]+\]|[^:/]+):\d{1,5}$/.test(address)) {
    throw new TypeError(`address ${JSON.stringify(address)}: "host:port" or "unix:/path" is needed`);
  }
  if (options.secret !== undefined && options.tls === undefined) {
    throw new TypeError("secret: tokens would travel in plaintext; give tls too");
  }
  if (options.secret !== undefined && options.secret.length < SHORTEST_SECRET) {
    throw new TypeError(`secret: at least ${SHORTEST_SECRET} characters are needed`);
  }
  const baseUrl = `${options.tls ? "https" : "http"}://${path === undefined ? address : "localhost"}`;
  const session = path === undefined ? options.tls : { ...options.tls, createConnection: () => openSocket(path) };
  // A host that vanished closes nothing: without pings its connection would stand for a quarter of an hour.
  const pings = { pingIntervalMs: PING_INTERVAL_MS, pingTimeoutMs: PING_TIMEOUT_MS };
  const sessionManager = new Http2SessionManager(baseUrl, pings, session);
  const bearers = options.secret === undefined ? [] : [bearer(options.secret, targetOf(address))];
  return createGrpcTransport({ baseUrl, sessionManager, interceptors: [leftWhenSilent(sessionManager), ...bearers] });
}

/** A client of one service: `clientOf(RegistryService, connect("127.0.0.1:8998"))`. */
export function clientOf<Service extends DescService>(service: Service, transport: Transport): Client<Service> {
  return createClient(service, transport);
}

/** A frozen process holds its connections open: one on which a watch heard nothing is left for a new one. */
function leftWhenSilent(sessions: Http2SessionManager): Interceptor {
  return (next) => (request) => {
    const { signal } = request;
    const leave = () => {
      if (signal.reason instanceof Silence) {
        sessions.abort(signal.reason);
      }
    };
    signal.addEventListener("abort", leave, { once: true });
    return next(request);
  };
}

function bearer(secret: string, target: string): Interceptor {
  return (next) => (request) => {
    request.header.set("authorization", authorization(secret, target, Math.floor(Date.now() / 1000)));
    return next(request);
  };
}
