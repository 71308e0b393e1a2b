export { clientOf, connect, type ConnectOptions } from "./connect.js";
export { failureOf, mayRepeat, type Failure } from "./errors.js";
export * from "./events.js";
export { watchEvents, type WatchItem, type WatchOptions } from "./watch.js";
export { ErrorReason } from "./gen/kvgrpc/v1/error_reason_pb.js";
export { EventService } from "./gen/kvgrpc/v1/event_service_pb.js";
export { RegistryService } from "./gen/kvgrpc/v1/registry_service_pb.js";
export { ServerService } from "./gen/kvgrpc/v1/server_service_pb.js";
export { TransferService } from "./gen/kvgrpc/v1/transfer_service_pb.js";
