/* The table of a KDTR file: metadata and array entries, taken apart and checked. Part of kdtr.h. */
#ifndef KDTR_TABLE_H
#define KDTR_TABLE_H

#include <inttypes.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KDTR_ALIGN 64
#define KDTR_MAX_DIMS 8
#define KDTR_MAX_TABLE (UINT64_C(1) << 26) /* bytes */
#define KDTR_FIXED 40                      /* bytes of the fixed header */

enum kdtr_dtype {
    KDTR_FLOAT32 = 1, KDTR_FLOAT64, KDTR_FLOAT16, KDTR_BFLOAT16, KDTR_BOOL, KDTR_INT8, KDTR_UINT8,
    KDTR_INT16, KDTR_UINT16, KDTR_INT32, KDTR_UINT32, KDTR_INT64, KDTR_UINT64
};

enum kdtr_kind { KDTR_INT = 1, KDTR_FLOAT, KDTR_TEXT, KDTR_LIST };

/* A metadata value. `text` is UTF-8 of `count` bytes, not terminated. A list has `count` items, taken by kdtr_next. */
typedef struct {
    int kind;
    int64_t integer;
    double real;
    uint32_t count;
    const char *text;
    const unsigned char *items;
} kdtr_value;

typedef struct {
    const char *key;
    kdtr_value value;
} kdtr_metadata;

/* An array of the file: `offset` and `nbytes` of its data, row-major, from the start of the file. */
typedef struct {
    const char *name;
    int dtype;
    int n_dims;
    uint64_t dims[KDTR_MAX_DIMS];
    uint64_t offset;
    uint64_t nbytes;
    uint32_t crc32;
} kdtr_array;

/* An open file: entries in the file's order. All names and texts live until kdtr_close. */
typedef struct {
    FILE *stream;
    char *path;
    unsigned char *table;
    kdtr_metadata *metadata;
    kdtr_array *arrays;
    uint64_t file_bytes;
    uint32_t n_metadata;
    uint32_t n_arrays;
} kdtr_file;

static inline uint64_t kdtr_uint(const unsigned char *bytes, int count) {
    uint64_t value = 0;
    while (count-- > 0) value = value << 8 | bytes[count];
    return value;
}

/* Whether the bytes are UTF-8 as Unicode defines it: shortest forms only, no surrogates, nothing above U+10FFFF. */
static inline int kdtr_is_utf8(const unsigned char *s, uint32_t count) {
    uint32_t i = 0;
    while (i < count) {
        unsigned c = s[i++];
        uint32_t more = c < 0x80 ? 0 : c < 0xe0 ? 1 : c < 0xf0 ? 2 : 3;
        unsigned low = c == 0xe0 ? 0xa0 : c == 0xf0 ? 0x90 : 0x80;
        unsigned high = c == 0xed ? 0x9f : c == 0xf4 ? 0x8f : 0xbf;
        if ((c >= 0x80 && c < 0xc2) || c > 0xf4 || more > count - i) return 0;
        for (; more > 0; more--, i++, low = 0x80, high = 0xbf)
            if (s[i] < low || s[i] > high) return 0;
    }
    return 1;
}

static inline uint64_t kdtr_itemsize(int dtype) {
    static const unsigned char bytes[] = {0, 4, 8, 2, 2, 1, 1, 1, 2, 2, 4, 4, 8, 8};
    return bytes[dtype];
}

/* Where reading stands, and what a complaint needs. `kind`, `index` and `name` say what is being read. */
typedef struct {
    const char *path;
    char *error;
    size_t error_size;
    unsigned char *bytes;
    uint64_t size;
    uint64_t at;
    const char *kind;
    uint32_t index;
    const char *name;
} kdtr_cursor;

/* Write `path: where: ` and the rest into the caller's buffer; returns -1. */
__attribute__((format(printf, 2, 3)))
static inline int kdtr_fail(const kdtr_cursor *c, const char *format, ...) {
    va_list values;
    char index[16] = "";
    const char *quote = c->name ? "'" : "";
    int used;
    if (c->index != UINT32_MAX) snprintf(index, sizeof index, " %" PRIu32, c->index);
    used = snprintf(c->error, c->error_size, "%s: %s%s%s%s%s%s: ", c->path, c->kind, index, c->name ? " " : "", quote,
                    c->name ? c->name : "", quote);
    if (used < 0 || (size_t)used >= c->error_size) return -1;
    va_start(values, format);
    vsnprintf(c->error + used, c->error_size - (size_t)used, format, values);
    va_end(values);
    return -1;
}

static inline void kdtr_at(kdtr_cursor *c, const char *kind, uint32_t index) {
    c->kind = kind;
    c->index = index;
    c->name = NULL;
}

/* The next `count` bytes of the table, or NULL with the complaint written. */
static inline unsigned char *kdtr_take(kdtr_cursor *c, uint64_t count) {
    uint64_t left = c->size - c->at;
    if (count > left) {
        kdtr_fail(c, "table: want %" PRIu64 " more bytes, found %" PRIu64, count, left);
        return NULL;
    }
    c->at += count;
    return c->bytes + (c->at - count);
}

/* Room for one more element at the end of `list` of `used`, or NULL; the capacity is the next power of two. */
static inline void *kdtr_grow(const kdtr_cursor *c, void *list, uint32_t used, size_t element) {
    void *grown = list;
    if ((used & (used - 1)) == 0) grown = realloc(list, (used ? (size_t)used * 2 : 1) * element);
    if (!grown) kdtr_fail(c, "memory: want %zu bytes, found none", (size_t)used * 2 * element);
    return grown;
}

/* A key or name. It is moved down onto its length byte, which makes room for a terminator. */
static inline const char *kdtr_take_name(kdtr_cursor *c) {
    unsigned char *length = kdtr_take(c, 1);
    unsigned count = length ? *length : 0;
    int legal = 1;
    if (!length || !kdtr_take(c, count)) return NULL;
    for (unsigned i = 0; i < count; i++) {
        length[i] = length[i + 1];
        legal &= length[i] >= 0x21 && length[i] <= 0x7e;
    }
    if (count == 0 || !legal) {
        kdtr_fail(c, "name: want 1..255 printable ASCII characters without space, found %s", count ? "others" : "none");
        return NULL;
    }
    length[count] = 0;
    return c->name = (const char *)length;
}

/* The value whose kind, number or length lie at `bytes`; a text or list only up to its count. */
static inline void kdtr_decode(const unsigned char *bytes, kdtr_value *value) {
    uint64_t bits;
    memset(value, 0, sizeof *value);
    value->kind = bytes[0];
    bits = kdtr_uint(bytes + 1, value->kind <= KDTR_FLOAT ? 8 : 4);
    if (value->kind == KDTR_INT) memcpy(&value->integer, &bits, 8);
    else if (value->kind == KDTR_FLOAT) memcpy(&value->real, &bits, 8);
    else value->count = (uint32_t)bits;
    if (value->kind == KDTR_TEXT) value->text = (const char *)bytes + 5;
    if (value->kind == KDTR_LIST) value->items = bytes + 5;
}

static inline int kdtr_take_value(kdtr_cursor *c, int highest, kdtr_value *value) {
    const unsigned char *kind = kdtr_take(c, 1);
    if (!kind) return -1;
    if (*kind < KDTR_INT || *kind > highest) return kdtr_fail(c, "kind: want 1..%d, found %d", highest, *kind);
    if (!kdtr_take(c, *kind <= KDTR_FLOAT ? 8 : 4)) return -1;
    kdtr_decode(kind, value);
    if (value->kind != KDTR_TEXT) return 0;
    if (!kdtr_take(c, value->count)) return -1;
    if (!kdtr_is_utf8((const unsigned char *)value->text, value->count))
        return kdtr_fail(c, "string: want UTF-8, found other bytes");
    return 0;
}

/* One metadata entry; the items of a list are walked here, so that kdtr_next need not check. */
static inline int kdtr_take_metadata(kdtr_cursor *c, kdtr_metadata *entry) {
    kdtr_value item;
    entry->key = kdtr_take_name(c);
    if (!entry->key || kdtr_take_value(c, KDTR_LIST, &entry->value)) return -1;
    if (entry->value.kind != KDTR_LIST) return 0;
    for (uint32_t i = 0; i < entry->value.count; i++)
        if (kdtr_take_value(c, KDTR_TEXT, &item)) return -1;
    return 0;
}

/* Bytes of an array's data; a complaint if even its dims other than 0 make 2^63 or more. */
static inline int kdtr_measure(const kdtr_cursor *c, kdtr_array *array) {
    uint64_t span = kdtr_itemsize(array->dtype);
    char text[KDTR_MAX_DIMS * 21 + 1] = "";
    int empty = 0, overflow = 0;
    for (int i = 0; i < array->n_dims; i++) {
        uint64_t dim = array->dims[i];
        snprintf(text + strlen(text), sizeof text - strlen(text), i ? "x%" PRIu64 : "%" PRIu64, dim);
        empty |= dim == 0;
        if (dim > 1) overflow |= span > INT64_MAX / dim;
        if (dim > 1) span *= dim; /* wraps only after the overflow is known */
    }
    if (overflow) return kdtr_fail(c, "dims: want a product below 2^63 bytes, found %s", text);
    array->nbytes = empty ? 0 : span;
    return 0;
}

/* One array entry; its data may start at `floor`, where what comes before it ends. */
static inline int kdtr_take_array(kdtr_cursor *c, kdtr_array *array, uint64_t floor, uint64_t file_bytes) {
    const unsigned char *bytes;
    memset(array, 0, sizeof *array);
    array->name = kdtr_take_name(c);
    if (!array->name || !(bytes = kdtr_take(c, 2))) return -1;
    array->dtype = bytes[0];
    array->n_dims = bytes[1];
    if (array->dtype < KDTR_FLOAT32 || array->dtype > KDTR_UINT64)
        return kdtr_fail(c, "dtype: want 1..%d, found %d", KDTR_UINT64, array->dtype);
    if (array->n_dims > KDTR_MAX_DIMS)
        return kdtr_fail(c, "dims: want at most %d, found %d", KDTR_MAX_DIMS, array->n_dims);
    if (!(bytes = kdtr_take(c, 8 * (uint64_t)array->n_dims))) return -1;
    for (int i = 0; i < array->n_dims; i++) array->dims[i] = kdtr_uint(bytes + 8 * i, 8);
    if (!(bytes = kdtr_take(c, 12))) return -1;
    array->offset = kdtr_uint(bytes, 8);
    array->crc32 = (uint32_t)kdtr_uint(bytes + 8, 4);
    if (kdtr_measure(c, array)) return -1;
    if (array->offset % KDTR_ALIGN)
        return kdtr_fail(c, "offset: want a multiple of %d, found %" PRIu64, KDTR_ALIGN, array->offset);
    if (array->offset < floor)
        return kdtr_fail(c, "offset: want at least %" PRIu64 ", found %" PRIu64, floor, array->offset);
    if (array->offset > file_bytes || array->nbytes > file_bytes - array->offset)
        return kdtr_fail(c, "data: want an end by byte %" PRIu64 ", found %" PRIu64 " bytes at %" PRIu64, file_bytes,
                         array->nbytes, array->offset);
    return 0;
}

static inline int kdtr_compare_names(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Refuse two entries of one name. The names, const char *, are the first members of the `n` elements at `first`. */
static inline int kdtr_check_distinct(kdtr_cursor *c, const char *kind, const void *first, size_t element, uint32_t n) {
    const char **sorted = (const char **)malloc(((size_t)n + 1) * sizeof *sorted);
    int rc = 0;
    kdtr_at(c, kind, UINT32_MAX);
    if (!sorted) return kdtr_fail(c, "memory: want %zu bytes, found none", ((size_t)n + 1) * sizeof *sorted);
    for (uint32_t i = 0; i < n; i++) memcpy(&sorted[i], (const char *)first + i * element, sizeof *sorted);
    qsort(sorted, n, sizeof *sorted, kdtr_compare_names);
    for (uint32_t i = 1; i < n && !rc; i++)
        if (strcmp(sorted[i - 1], sorted[i]) == 0)
            rc = kdtr_fail(c, "name: want distinct ones, found two of '%s'", sorted[i]);
    free((void *)sorted);
    return rc;
}

static inline int kdtr_take_table(kdtr_file *file, kdtr_cursor *c, uint32_t n_metadata, uint32_t n_arrays) {
    uint64_t floor = KDTR_FIXED + c->size;
    for (uint32_t i = 0; i < n_metadata; i++) {
        void *grown;
        kdtr_at(c, "metadata", i);
        if (!(grown = kdtr_grow(c, file->metadata, i, sizeof *file->metadata))) return -1;
        file->metadata = (kdtr_metadata *)grown;
        if (kdtr_take_metadata(c, &file->metadata[i])) return -1;
        file->n_metadata = i + 1;
    }
    if (kdtr_check_distinct(c, "metadata", file->metadata, sizeof *file->metadata, file->n_metadata)) return -1;
    for (uint32_t i = 0; i < n_arrays; i++) {
        void *grown;
        kdtr_at(c, "array", i);
        if (!(grown = kdtr_grow(c, file->arrays, i, sizeof *file->arrays))) return -1;
        file->arrays = (kdtr_array *)grown;
        if (kdtr_take_array(c, &file->arrays[i], floor, file->file_bytes)) return -1;
        file->n_arrays = i + 1;
        floor = file->arrays[i].offset + file->arrays[i].nbytes;
    }
    kdtr_at(c, "table", UINT32_MAX);
    if (c->at != c->size) return kdtr_fail(c, "size: want %" PRIu64 " bytes, found %" PRIu64, c->at, c->size);
    return kdtr_check_distinct(c, "arrays", file->arrays, sizeof *file->arrays, file->n_arrays);
}

#endif
