/**
 * Reads msgpack as null, boolean, number and bigint (integers; 64-bit ones are bigint), Float, string, Uint8Array, arrays,
 * objects and STRANGE. Strict where a general library is not: an integer is no float, text is UTF-8, and what a header
 * promises is never allocated before its bytes are there.
 */

/** A number that was written as one with a point. */
export class Float {
  constructor(readonly value: number) {}
}

/** A value that is passed over: an extension, or a map with keys that are no text. */
export const STRANGE = Symbol("strange");

// Batches are four deep; what nests deeper is hostile. No less than publishers read.
const DEEPEST = 500;
/** The extension of that number is a time, of the years 1 to 9999. */
const TIMESTAMP = 0xff;
const EARLIEST = -62_135_596_800n;
const LATEST = 253_402_300_799n;

const utf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

export class Reader {
  readonly #bytes: Uint8Array;
  readonly #view: DataView;
  #at = 0;
  /** How many keys of maps, one within the other, this is in. */
  #keys = 0;

  constructor(bytes: Uint8Array) {
    this.#bytes = bytes;
    this.#view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  }

  get left(): number {
    return this.#bytes.length - this.#at;
  }

  /** Reads one value. */
  value(depth = 0): unknown {
    const code = this.#byte();
    if (depth > DEEPEST) {
      throw new RangeError("it nests too deep");
    }
    if (code <= 0x7f || code >= 0xe0) {
      return code <= 0x7f ? code : code - 0x100;
    }
    if (code <= 0x8f) {
      return this.#fields(code & 0x0f, depth);
    }
    if (code <= 0x9f) {
      return this.#list(code & 0x0f, depth);
    }
    if (code <= 0xbf) {
      return this.#text(code & 0x1f);
    }
    switch (code) {
      case 0xc0:
        return null;
      case 0xc2:
      case 0xc3:
        return code === 0xc3;
      case 0xca:
        return new Float(this.#view.getFloat32(this.#pass(4)));
      case 0xcb:
        return new Float(this.#view.getFloat64(this.#pass(8)));
      case 0xcc:
      case 0xcd:
      case 0xce:
        return this.#size(1 << (code - 0xcc));
      case 0xcf:
        return this.#view.getBigUint64(this.#pass(8));
      case 0xd0:
        return this.#view.getInt8(this.#pass(1));
      case 0xd1:
        return this.#view.getInt16(this.#pass(2));
      case 0xd2:
        return this.#view.getInt32(this.#pass(4));
      case 0xd3:
        return this.#view.getBigInt64(this.#pass(8));
      case 0xc4:
      case 0xc5:
      case 0xc6:
        return this.#slice(this.#size(1 << (code - 0xc4))).slice();
      case 0xd9:
      case 0xda:
      case 0xdb:
        return this.#text(this.#size(1 << (code - 0xd9)));
      case 0xdc:
      case 0xdd:
        return this.#list(this.#size(2 << (code - 0xdc)), depth);
      case 0xde:
      case 0xdf:
        return this.#fields(this.#size(2 << (code - 0xde)), depth);
    }
    const extension = this.#slice(this.#extent(code).size);
    if (extension[0] === TIMESTAMP) {
      checkTime(extension.subarray(1));
    } else if (this.#keys > 0) {
      throw new RangeError("an extension is no key");
    }
    return STRANGE;
  }

  /** How many values the list has that begins here. */
  listHeader(): number {
    const code = this.#byte();
    if (code >= 0x90 && code <= 0x9f) {
      return code & 0x0f;
    }
    if (code !== 0xdc && code !== 0xdd) {
      throw new RangeError("no list");
    }
    return this.#size(2 << (code - 0xdc));
  }

  /** Passes over one value, however deep, and returns its bytes. What it holds need not make sense. */
  skip(): Uint8Array {
    const begin = this.#at;
    for (let values = 1; values > 0; values -= 1) {
      const extent = this.#extent(this.#byte());
      this.#pass(extent.size);
      values += extent.values;
      this.#promise(values - 1);
    }
    return this.#bytes.subarray(begin, this.#at);
  }

  /** How many bytes and values follow a header; reads the numbers that say so. */
  #extent(code: number): { size: number; values: number } {
    const bytes = (size: number) => ({ size, values: 0 });
    const list = (values: number) => ({ size: 0, values });
    if (code <= 0x7f || code >= 0xe0 || code === 0xc0 || code === 0xc2 || code === 0xc3) {
      return bytes(0);
    }
    if (code <= 0x8f) {
      return list(2 * (code & 0x0f));
    }
    if (code <= 0x9f) {
      return list(code & 0x0f);
    }
    if (code <= 0xbf) {
      return bytes(code & 0x1f);
    }
    switch (code) {
      case 0xc4:
      case 0xc5:
      case 0xc6:
        return bytes(this.#size(1 << (code - 0xc4)));
      case 0xc7:
      case 0xc8:
      case 0xc9:
        return bytes(this.#size(1 << (code - 0xc7)) + 1);
      case 0xca:
      case 0xcb:
        return bytes(4 << (code - 0xca));
      case 0xcc:
      case 0xcd:
      case 0xce:
      case 0xcf:
        return bytes(1 << (code - 0xcc));
      case 0xd0:
      case 0xd1:
      case 0xd2:
      case 0xd3:
        return bytes(1 << (code - 0xd0));
      case 0xd4:
      case 0xd5:
      case 0xd6:
      case 0xd7:
      case 0xd8:
        return bytes((1 << (code - 0xd4)) + 1);
      case 0xd9:
      case 0xda:
      case 0xdb:
        return bytes(this.#size(1 << (code - 0xd9)));
      case 0xdc:
      case 0xdd:
        return list(this.#size(2 << (code - 0xdc)));
      case 0xde:
      case 0xdf:
        return list(2 * this.#size(2 << (code - 0xde)));
    }
    throw new RangeError("a byte that no value begins with");
  }

  #list(count: number, depth: number): unknown[] {
    this.#promise(count);
    const values: unknown[] = [];
    for (let index = 0; index < count; index += 1) {
      values.push(this.value(depth + 1));
    }
    return values;
  }

  #fields(count: number, depth: number): unknown {
    this.#promise(2 * count);
    if (this.#keys > 0) {
      throw new RangeError("a map is no key, nor in one: publishers cannot read it");
    }
    const fields: [string, unknown][] = [];
    let strange = false;
    for (let index = 0; index < count; index += 1) {
      this.#keys += 1;
      const key = this.value(depth + 1);
      this.#keys -= 1;
      const value = this.value(depth + 1);
      if (typeof key === "string") {
        fields.push([key, value]);
      } else {
        strange = true;
      }
    }
    // Not by assignment: "__proto__" is a key like any other.
    return strange ? STRANGE : Object.fromEntries(fields);
  }

  #text(size: number): string {
    return utf8.decode(this.#slice(size));
  }

  #slice(size: number): Uint8Array {
    const begin = this.#pass(size);
    return this.#bytes.subarray(begin, begin + size);
  }

  #size(width: number): number {
    const at = this.#pass(width);
    return width === 1 ? this.#view.getUint8(at) : width === 2 ? this.#view.getUint16(at) : this.#view.getUint32(at);
  }

  #byte(): number {
    return this.#view.getUint8(this.#pass(1));
  }

  /** Each value has at least one byte. */
  #promise(values: number): void {
    if (values > this.left) {
      throw new RangeError("it ends too early");
    }
  }

  #pass(size: number): number {
    this.#promise(size);
    const begin = this.#at;
    this.#at += size;
    return begin;
  }
}

/** Refuses what publishers do, whose library makes a date of it. */
function checkTime(written: Uint8Array): void {
  const view = new DataView(written.buffer, written.byteOffset, written.length);
  const { length } = written;
  const nanoseconds = length === 4 ? 0 : length === 8 ? view.getUint32(0) >>> 2 : length === 12 ? view.getUint32(0) : NaN;
  const seconds = length === 12 ? view.getBigInt64(4) : 0n;
  if (!(nanoseconds <= 999_999_999) || seconds < EARLIEST || seconds > LATEST) {
    throw new RangeError("no time");
  }
}
