/* KDTR reader: named arrays and metadata from one file, by fread alone. C11 and C++17, header only.
 *
 * docs/kdtr.md gives the bytes, kdtp/model/weights/kdtr.py writes and reads them too. This reader refuses exactly the
 * files that the Python reader refuses, with the same text. It allocates nothing from a size it has not checked: the
 * table is held whole (64 MiB at most), the lists grow as entries are read. Numbers of the table are composed byte by
 * byte; array data is given as stored, little-endian.
 *
 *     kdtr_file file;
 *     char error[1024];
 *     if (kdtr_open(&file, "x.kdtr", error, sizeof error)) die(error);
 *     const kdtr_array *embed = kdtr_find(&file, "embed");
 *     ... check embed->dtype and dims, allocate embed->nbytes ...
 *     if (kdtr_read(&file, embed, buffer, error, sizeof error)) die(error);
 *     kdtr_close(&file);
 */
#ifndef KDTR_H
#define KDTR_H

#include <errno.h>

#include "kdtr_table.h"

#define KDTR_VERSION 1
#define KDTR_MAGIC "KDTR\r\n\x1a\n"
#define KDTR_CHECKED_FROM 16 /* the header's crc32 covers from here to the end of the table */

/* fseek and ftell carry file offsets as long. */
typedef char kdtr_needs_a_long_of_64_bits[sizeof(long) == 8 ? 1 : -1];

/* The CRC-32 of zlib; `crc` is that of the bytes before, 0 at the start. Half a byte a step: a table of 16 words. */
static inline uint32_t kdtr_crc32(uint32_t crc, const unsigned char *bytes, uint64_t count) {
    static const uint32_t step[16] = {
        0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac, 0x76dc4190, 0x6b6b51f4, 0x4db26158, 0x5005713c,
        0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c, 0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c};
    crc = ~crc;
    for (uint64_t i = 0; i < count; i++) {
        crc = step[(crc ^ bytes[i]) & 15] ^ crc >> 4;
        crc = step[(crc ^ bytes[i] >> 4) & 15] ^ crc >> 4;
    }
    return ~crc;
}

static inline void kdtr_close(kdtr_file *file) {
    if (file->stream) fclose(file->stream);
    free(file->path);
    free(file->table);
    free(file->metadata);
    free(file->arrays);
    memset(file, 0, sizeof *file);
}

/* Read `count` bytes at `offset`, both known to lie within the file. */
static inline int kdtr_read_at(const kdtr_file *file, const kdtr_cursor *c, uint64_t offset, void *to, uint64_t count) {
    size_t got = 0;
    if (fseek(file->stream, (long)offset, SEEK_SET) == 0 && count > 0) got = fread(to, 1, count, file->stream);
    if (got < count) return kdtr_fail(c, "read: want %" PRIu64 " bytes at %" PRIu64 ", found %zu", count, offset, got);
    return 0;
}

/* The fixed header, once its numbers are known to fit the file; then the table behind it. */
static inline int kdtr_read_head(kdtr_file *file, kdtr_cursor *c) {
    unsigned char head[KDTR_FIXED];
    uint64_t most = file->file_bytes - KDTR_FIXED;
    uint32_t crc;
    if (most > KDTR_MAX_TABLE) most = KDTR_MAX_TABLE;
    if (kdtr_read_at(file, c, 0, head, KDTR_FIXED)) return -1;
    kdtr_at(c, "header", UINT32_MAX);
    if (memcmp(head, KDTR_MAGIC, 8) != 0)
        return kdtr_fail(c, "magic: want 4b4454520d0a1a0a, found %02x%02x%02x%02x%02x%02x%02x%02x", head[0], head[1],
                         head[2], head[3], head[4], head[5], head[6], head[7]);
    if (kdtr_uint(head + 8, 4) != KDTR_VERSION)
        return kdtr_fail(c, "version: want %d, found %" PRIu64, KDTR_VERSION, kdtr_uint(head + 8, 4));
    if (kdtr_uint(head + 16, 8) != file->file_bytes)
        return kdtr_fail(c, "file size: want %" PRIu64 " bytes, found %" PRIu64, kdtr_uint(head + 16, 8),
                         file->file_bytes);
    c->size = kdtr_uint(head + 24, 8);
    if (c->size > most) return kdtr_fail(c, "table size: want at most %" PRIu64 " bytes, found %" PRIu64, most, c->size);
    c->bytes = file->table = (unsigned char *)malloc((size_t)c->size + 1);
    if (!c->bytes) return kdtr_fail(c, "memory: want %" PRIu64 " bytes, found none", c->size);
    if (kdtr_read_at(file, c, KDTR_FIXED, c->bytes, c->size)) return -1;
    crc = kdtr_crc32(0, head + KDTR_CHECKED_FROM, KDTR_FIXED - KDTR_CHECKED_FROM);
    crc = kdtr_crc32(crc, c->bytes, c->size);
    if (crc != kdtr_uint(head + 12, 4))
        return kdtr_fail(c, "crc32: want 0x%08x, found 0x%08x", (unsigned)kdtr_uint(head + 12, 4), (unsigned)crc);
    return kdtr_take_table(file, c, (uint32_t)kdtr_uint(head + 32, 4), (uint32_t)kdtr_uint(head + 36, 4));
}

static inline int kdtr_open_stream(kdtr_file *file, kdtr_cursor *c) {
    long size;
    file->path = (char *)malloc(strlen(c->path) + 1);
    if (!file->path) return kdtr_fail(c, "memory: want %zu bytes, found none", strlen(c->path) + 1);
    strcpy(file->path, c->path);
    file->stream = fopen(c->path, "rb");
    if (!file->stream) return kdtr_fail(c, "open: %s", strerror(errno));
    if (fseek(file->stream, 0, SEEK_END) != 0 || (size = ftell(file->stream)) < 0)
        return kdtr_fail(c, "size: %s", strerror(errno));
    if (size < KDTR_FIXED) return kdtr_fail(c, "size: want at least %d bytes, found %ld", KDTR_FIXED, size);
    file->file_bytes = (uint64_t)size;
    return 0;
}

/* Open a file and check its header and table. Returns 0, or -1 with `error` written and nothing left to close. */
static inline int kdtr_open(kdtr_file *file, const char *path, char *error, size_t error_size) {
    kdtr_cursor c = {path, error, error_size, NULL, 0, 0, "file", UINT32_MAX, NULL};
    memset(file, 0, sizeof *file);
    if (kdtr_open_stream(file, &c) == 0 && kdtr_read_head(file, &c) == 0) return 0;
    kdtr_close(file);
    return -1;
}

/* The array of this name, or NULL. */
static inline const kdtr_array *kdtr_find(const kdtr_file *file, const char *name) {
    for (uint32_t i = 0; i < file->n_arrays; i++)
        if (strcmp(file->arrays[i].name, name) == 0) return &file->arrays[i];
    return NULL;
}

/* The metadata value of this key, or NULL. */
static inline const kdtr_value *kdtr_find_value(const kdtr_file *file, const char *key) {
    for (uint32_t i = 0; i < file->n_metadata; i++)
        if (strcmp(file->metadata[i].key, key) == 0) return &file->metadata[i].value;
    return NULL;
}

/* The item at `*items` of a list, which then points to the next: start with list->items, call list->count times. */
static inline kdtr_value kdtr_next(const unsigned char **items) {
    kdtr_value item;
    kdtr_decode(*items, &item);
    *items += item.kind == KDTR_TEXT ? 5 + (size_t)item.count : 9;
    return item;
}

/* Read an array's data, array->nbytes, into `to` and check it. Returns 0, or -1 with `error` written. */
static inline int kdtr_read(const kdtr_file *file, const kdtr_array *array, void *to, char *error, size_t error_size) {
    kdtr_cursor c = {file->path, error, error_size, NULL, 0, 0, "array", UINT32_MAX, array->name};
    const unsigned char *bytes = (const unsigned char *)to;
    unsigned most = 0;
    uint32_t crc;
    if (kdtr_read_at(file, &c, array->offset, to, array->nbytes)) return -1;
    crc = kdtr_crc32(0, bytes, array->nbytes);
    if (crc != array->crc32)
        return kdtr_fail(&c, "crc32: want 0x%08x, found 0x%08x", (unsigned)array->crc32, (unsigned)crc);
    for (uint64_t i = 0; array->dtype == KDTR_BOOL && i < array->nbytes; i++)
        if (bytes[i] > most) most = bytes[i];
    if (most > 1) return kdtr_fail(&c, "bool: want bytes 0 and 1, found %u", most);
    return 0;
}

#endif
