/* Print what the KDTR reader sees in each file named on standard input, one path a line: its table, and of every array
 * an Adler-32 of the data (a checksum the format does not use) and its first and last element. A file that is refused
 * gives one line, "error" and the text; the exit code is 0 all the same. tests/cpu/test_kdtr_c.py prints the same. */
#include <stdio.h>

#include "kdtr.h"

static uint32_t adler32(const unsigned char *bytes, uint64_t count) {
    uint32_t a = 1, b = 0;
    for (uint64_t i = 0; i < count; i++) {
        a = (a + bytes[i]) % 65521;
        b = (b + a) % 65521;
    }
    return b << 16 | a;
}

static void print_value(const kdtr_value *value) {
    uint64_t bits;
    if (value->kind == KDTR_INT) printf(" int %" PRId64, value->integer);
    if (value->kind == KDTR_FLOAT) {
        memcpy(&bits, &value->real, 8);
        printf(" float %016" PRIx64, bits);
    }
    if (value->kind == KDTR_TEXT) {
        printf(" text ");
        for (uint32_t i = 0; i < value->count; i++) printf("%02x", (unsigned)(unsigned char)value->text[i]);
    }
    if (value->kind == KDTR_LIST) {
        const unsigned char *items = value->items;
        printf(" list %" PRIu32, value->count);
        for (uint32_t i = 0; i < value->count; i++) {
            kdtr_value item = kdtr_next(&items);
            print_value(&item);
        }
    }
}

static void print_element(int dtype, const unsigned char *at) {
    uint64_t bits = kdtr_uint(at, (int)kdtr_itemsize(dtype));
    float f;
    double d;
    memcpy(&f, at, dtype == KDTR_FLOAT32 ? 4 : 0);
    memcpy(&d, at, dtype == KDTR_FLOAT64 ? 8 : 0);
    if (dtype == KDTR_FLOAT32) printf(" %.9g", (double)f);
    else if (dtype == KDTR_FLOAT64) printf(" %.17g", d);
    else if (dtype == KDTR_INT8) printf(" %d", (int8_t)bits);
    else if (dtype == KDTR_INT16) printf(" %d", (int16_t)bits);
    else if (dtype == KDTR_INT32) printf(" %" PRId32, (int32_t)bits);
    else if (dtype == KDTR_INT64) printf(" %" PRId64, (int64_t)bits);
    else printf(" %" PRIu64, bits); /* unsigned, bool, and the raw bits of the 16-bit floats */
}

static int print_array(const kdtr_file *file, const kdtr_array *array) {
    char error[1024];
    unsigned char *data = (unsigned char *)malloc((size_t)array->nbytes + 1); /* nbytes is at most the file's size */
    if (!data) return 1;
    if (kdtr_read(file, array, data, error, sizeof error)) {
        printf("error %s\n", error);
    } else {
        printf("array %s dtype %d dims", array->name, array->dtype);
        for (int i = 0; i < array->n_dims; i++) printf(" %" PRIu64, array->dims[i]);
        printf(" at %" PRIu64 " bytes %" PRIu64, array->offset, array->nbytes);
        printf(" adler %08x", (unsigned)adler32(data, array->nbytes));
        if (array->nbytes) {
            print_element(array->dtype, data);
            print_element(array->dtype, data + array->nbytes - kdtr_itemsize(array->dtype));
        }
        printf("\n");
    }
    free(data);
    return 0;
}

static int print_file(const char *path) {
    kdtr_file file;
    char error[1024];
    if (kdtr_open(&file, path, error, sizeof error)) {
        printf("error %s\n", error);
        return 0;
    }
    for (uint32_t i = 0; i < file.n_metadata; i++) {
        printf("metadata %s", file.metadata[i].key);
        print_value(&file.metadata[i].value);
        printf("\n");
        if (kdtr_find_value(&file, file.metadata[i].key) != &file.metadata[i].value) return 1;
    }
    for (uint32_t i = 0; i < file.n_arrays; i++) {
        if (kdtr_find(&file, file.arrays[i].name) != &file.arrays[i] || print_array(&file, &file.arrays[i])) return 1;
    }
    if (kdtr_find(&file, "") || kdtr_find_value(&file, "")) return 1;
    kdtr_close(&file);
    return 0;
}

int main(void) {
    char path[4096];
    while (fgets(path, sizeof path, stdin)) {
        path[strcspn(path, "\n")] = 0;
        printf("file %s\n", path);
        if (print_file(path)) return 1;
    }
    return 0;
}
