"""What an engine and a caller write: .ci/release-check has mypy --strict read it against an installed kvgrpc."""

from kvgrpc.client import SyncClient
from kvgrpc.server import KVPoll, KVReceiver, KVSender, Pool, RankConfig, Role, open_decode, open_prefill


def hand_over(pool: Pool, room: int) -> KVPoll:
    prefill = open_prefill(RankConfig(engine="P", role=Role.PREFILL, pools=(pool,), registry="embedded"))
    decode = open_decode(RankConfig(engine="D", role=Role.DECODE, pools=(pool,)))
    with prefill, decode, KVSender(prefill.transfer, room=room) as sender:
        sender.init(1)
        with KVReceiver(decode.transfer, bootstrap_addr=prefill.address, room=room) as receiver:
            return receiver.poll()


def versions(address: str) -> dict[str, str]:
    with SyncClient(address) as client:
        return dict(client.get_server_info().versions)
