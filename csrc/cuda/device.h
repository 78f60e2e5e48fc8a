/* The device functions, the .cuh files of device/, as text in the library.
 *
 * The build writes the table from the files, in the order of their names. */
#ifndef PM_DEVICE_H
#define PM_DEVICE_H

extern const struct pm_device_file {
  const char *name; /* "mbarrier.cuh" */
  const char *text;
} pm_device_files[];
extern const unsigned pm_device_file_count;

#endif
