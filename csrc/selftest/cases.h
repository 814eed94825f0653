// What the selftest reads: the structs of params.h from its text, and kernel cases from a KDTR file, laid out as
// scripts/gen_kernel_cases.py says.
#pragma once
#include <stdarg.h>

#include <fstream>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "../common/kdtr.h"

// The selftest cannot go on: say why, and exit with 2.
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void die(const char* format, ...) {
  va_list list;
  va_start(list, format);
  fputs("selftest: ", stderr);
  vfprintf(stderr, format, list);
  fputs("\n", stderr);
  va_end(list);
  exit(2);
}

enum class Kind { kPointer, kInteger, kReal };

struct Field {
  std::string name;
  Kind kind;
};

// The op of a struct: KdtpRmsNormArgs is rms_norm's.
inline std::string op_of(const std::string& type) {
  std::string op;
  for (char c : type.substr(4, type.size() - 8)) {  // without Kdtp and Args
    const bool capital = c >= 'A' && c <= 'Z';
    if (capital && !op.empty()) op += '_';
    op += capital ? static_cast<char>(c - 'A' + 'a') : c;
  }
  return op;
}

// The fields of every op's struct, in order. Each is 8 bytes: that of index i lies at 8 * i.
inline std::map<std::string, std::vector<Field>> read_structs(const char* path) {
  std::ifstream file(path);
  if (!file) die("%s: cannot be read", path);
  std::map<std::string, std::vector<Field>> structs;
  std::vector<Field>* open = nullptr;
  for (std::string line; std::getline(file, line);) {
    const std::string start = "typedef struct ";
    if (line.rfind(start, 0) == 0) open = &structs[op_of(line.substr(start.size(), line.find(" {") - start.size()))];
    if (line.rfind("}", 0) == 0) open = nullptr;
    const size_t end = line.find(';');
    if (open == nullptr || end == std::string::npos || line.rfind("  ", 0) != 0) continue;
    const std::string field = line.substr(0, end);
    const Kind kind = field.find("void*") != std::string::npos     ? Kind::kPointer
                      : field.find("int64_t") != std::string::npos ? Kind::kInteger
                                                                   : Kind::kReal;
    open->push_back({field.substr(field.find_last_of(" *") + 1), kind});
  }
  return structs;
}

// The file of cases, by name.
class Cases {
 public:
  explicit Cases(const char* path) {
    if (kdtr_open(&file_, path, error_, sizeof error_)) die("%s", error_);
    for (uint32_t i = 0; i < file_.n_metadata; ++i) values_[file_.metadata[i].key] = &file_.metadata[i].value;
    for (uint32_t i = 0; i < file_.n_arrays; ++i) arrays_[file_.arrays[i].name] = &file_.arrays[i];
  }
  ~Cases() { kdtr_close(&file_); }
  Cases(const Cases&) = delete;
  Cases& operator=(const Cases&) = delete;

  // The value of this key; there must be one.
  const kdtr_value& value(const std::string& key) const {
    const auto found = values_.find(key);
    if (found == values_.end()) die("%s: has no value '%s'", file_.path, key.c_str());
    return *found->second;
  }

  std::string text(const std::string& key) const { return std::string(value(key).text, value(key).count); }

  double real(const std::string& key) const {
    const kdtr_value& found = value(key);
    return found.kind == KDTR_INT ? static_cast<double>(found.integer) : found.real;
  }

  // The array of this name, or null.
  const kdtr_array* array(const std::string& name) const {
    const auto found = arrays_.find(name);
    return found == arrays_.end() ? nullptr : found->second;
  }

  std::vector<unsigned char> bytes(const kdtr_array* array) {
    std::vector<unsigned char> data(array->nbytes);
    if (kdtr_read(&file_, array, data.data(), error_, sizeof error_)) die("%s", error_);
    return data;
  }

 private:
  kdtr_file file_;
  char error_[1024];
  std::unordered_map<std::string, const kdtr_value*> values_;
  std::unordered_map<std::string, const kdtr_array*> arrays_;
};
