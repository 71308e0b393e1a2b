// The engines of a registry, what the first rank that publishes caches, and a refusal by its reason: engines HOST:PORT
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <map>
#include <memory>
#include <string>

#include <grpcpp/grpcpp.h>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "kvgrpc/v1/event_service.grpc.pb.h"
#include "kvgrpc/v1/registry_service.grpc.pb.h"

namespace v1 = kvgrpc::v1;

namespace {

// A call has no deadline of its own.
void limit(grpc::ClientContext* context) { context->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10)); }

std::shared_ptr<grpc::Channel> dial(const std::string& address) {
  return grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
}

// Reason and metadata: what google.rpc.ErrorInfo of our domain says.
std::string refusal(const grpc::Status& status) {
  google::rpc::Status details;
  if (!details.ParseFromString(status.error_details())) return "(unreadable)";
  for (const auto& detail : details.details()) {
    google::rpc::ErrorInfo info;
    if (!detail.UnpackTo(&info) || info.domain() != "kvgrpc.dev") continue;
    std::string told = info.reason();
    for (const auto& [key, value] : std::map<std::string, std::string>(info.metadata().begin(), info.metadata().end())) {
      told += " " + key + "=" + value;
    }
    return told;
  }
  return "(no reason)";
}

// A snapshot is whole with the part that says last; its digest counts the blocks of each tier.
std::string contents(const std::string& address) {
  const auto events = v1::EventService::NewStub(dial(address));
  grpc::ClientContext context;
  limit(&context);
  v1::WatchRequest request;
  request.set_mode(v1::WATCH_MODE_SNAPSHOT);
  const auto watch = events->Watch(&context, request);
  v1::WatchResponse message;
  std::string told = "no snapshot";
  while (watch->Read(&message)) {
    if (!message.has_snapshot() || !message.snapshot().last()) continue;
    told = "blocks";
    for (const auto& tier : message.snapshot().state().tiers()) {
      told += " " + tier.medium() + "=" + std::to_string(tier.blocks()) + " mixed=" + std::to_string(tier.mixed_hashes());
    }
    break;
  }
  context.TryCancel();
  watch->Finish();
  return told;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) {
    std::fprintf(stderr, "usage: engines HOST:PORT\n");
    return 2;
  }
  const auto registry = v1::RegistryService::NewStub(dial(arguments[1]));
  v1::ListEnginesRequest request;
  request.set_include_rows(true);
  v1::ListEnginesResponse response;
  grpc::ClientContext listing;
  limit(&listing);
  if (const auto status = registry->ListEngines(&listing, request, &response); !status.ok()) {
    std::fprintf(stderr, "%s\n", status.error_message().c_str());
    return 1;
  }
  for (const auto& engine : response.engines()) {
    std::printf("%s %s %" PRIu32 "/%" PRIu32 "\n", engine.name().c_str(), v1::Role_Name(engine.role()).c_str(),
                engine.registered_ranks(), engine.expected_ranks());
    for (const auto& row : engine.rows()) {
      if (row.serves_events()) std::printf("%s\n", contents(row.endpoints().grpc()).c_str());
    }
  }
  v1::GetEngineRequest nobody;
  nobody.set_engine("nobody");
  v1::GetEngineResponse none;
  grpc::ClientContext asking;
  limit(&asking);
  const auto status = registry->GetEngine(&asking, nobody, &none);
  if (!status.ok()) std::printf("%s\n", refusal(status).c_str());
  return 0;
}
