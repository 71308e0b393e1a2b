package dev.kvgrpc.examples;

import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.ErrorInfo;
import dev.kvgrpc.v1.Engine;
import dev.kvgrpc.v1.EventServiceGrpc;
import dev.kvgrpc.v1.GetEngineRequest;
import dev.kvgrpc.v1.ListEnginesRequest;
import dev.kvgrpc.v1.RankRow;
import dev.kvgrpc.v1.RegistryServiceGrpc;
import dev.kvgrpc.v1.WatchMode;
import dev.kvgrpc.v1.WatchRequest;
import dev.kvgrpc.v1.WatchResponse;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import java.util.Iterator;
import java.util.List;
import java.util.TreeMap;
import java.util.concurrent.TimeUnit;

/** The engines of a registry, what the first rank that publishes caches, and a refusal by its reason: {@code Engines HOST:PORT}. */
public final class Engines {
  private static final String DOMAIN = "kvgrpc.dev";
  private static final int SECONDS = 10;

  public static void main(String[] arguments) {
    ManagedChannel channel = dial(arguments[0]);
    // A call has no deadline of its own.
    var registry = RegistryServiceGrpc.newBlockingStub(channel);
    var request = ListEnginesRequest.newBuilder().setIncludeRows(true).build();
    for (Engine engine : registry.withDeadlineAfter(SECONDS, TimeUnit.SECONDS).listEngines(request).getEnginesList()) {
      System.out.printf("%s %s %d/%d%n", engine.getName(), engine.getRole(), engine.getRegisteredRanks(), engine.getExpectedRanks());
      for (RankRow row : engine.getRowsList()) {
        if (row.getServesEvents()) {
          System.out.println(contents(row.getEndpoints().getGrpc()));
        }
      }
    }
    try {
      registry.withDeadlineAfter(SECONDS, TimeUnit.SECONDS).getEngine(GetEngineRequest.newBuilder().setEngine("nobody").build());
    } catch (StatusRuntimeException error) {
      System.out.println(refusal(error));
    }
    channel.shutdownNow();
  }

  /** A snapshot, which is whole with the part that says last; its digest counts the blocks of each tier. */
  private static String contents(String address) {
    ManagedChannel channel = dial(address);
    try {
      var events = EventServiceGrpc.newBlockingStub(channel).withDeadlineAfter(SECONDS, TimeUnit.SECONDS);
      Iterator<WatchResponse> watch = events.watch(WatchRequest.newBuilder().setMode(WatchMode.WATCH_MODE_SNAPSHOT).build());
      while (watch.hasNext()) {
        WatchResponse message = watch.next();
        if (message.hasSnapshot() && message.getSnapshot().getLast()) {
          var told = new StringBuilder("blocks");
          // Unsigned: Java has no type for it.
          message.getSnapshot().getState().getTiersList().forEach(
              tier -> told.append(' ').append(tier.getMedium()).append('=').append(tier.getBlocks())
                  .append(" mixed=").append(Long.toUnsignedString(tier.getMixedHashes())));
          return told.toString();
        }
      }
      return "no snapshot";
    } finally {
      channel.shutdownNow();
    }
  }

  /** Reason and metadata: what google.rpc.ErrorInfo of our domain says. */
  private static String refusal(StatusRuntimeException error) {
    var told = new StringBuilder();
    var status = StatusProto.fromThrowable(error);
    for (Any detail : status == null ? List.<Any>of() : status.getDetailsList()) {
      try {
        if (detail.is(ErrorInfo.class) && detail.unpack(ErrorInfo.class).getDomain().equals(DOMAIN)) {
          ErrorInfo info = detail.unpack(ErrorInfo.class);
          told.append(info.getReason());
          new TreeMap<>(info.getMetadataMap()).forEach((key, value) -> told.append(' ').append(key).append('=').append(value));
        }
      } catch (InvalidProtocolBufferException broken) {
        told.append(" (unreadable)");
      }
    }
    return told.toString();
  }

  private static ManagedChannel dial(String address) {
    return Grpc.newChannelBuilder(address, InsecureChannelCredentials.create()).build();
  }
}
